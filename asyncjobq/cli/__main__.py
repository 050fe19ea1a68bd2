"""`python -m asyncjobq.cli` is the command `asyncjobq`."""

from asyncjobq.cli import main

main()
