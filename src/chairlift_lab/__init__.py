"""The laboratory: benchmarks, profiles, simulation and the visual guide. The engine imports nothing from here."""
