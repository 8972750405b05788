"""``python -m preattn``: the command line without an installed console script."""

from .cli import main

main()
