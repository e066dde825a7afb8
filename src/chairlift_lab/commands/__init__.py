"""The commands of the laboratory, one module each; importing a module registers its command."""
