"""What all commands share: console output, help, and options."""
