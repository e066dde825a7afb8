"""`python -m chairlift` is the command line."""

from chairlift.cli import main

main()
