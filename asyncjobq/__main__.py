"""`python -m asyncjobq` is the command `asyncjobq`."""

from asyncjobq.cli import main

main()
