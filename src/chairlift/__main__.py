"""`python -m chairlift` is the command line."""

from chairlift.cli.main import main

main()
