"""`python -m jemlib`."""

from jemlib.cli import main

main(prog_name="jemlib")
