"""`python -m edgerun`: the same as the `edgerun` command."""

from edgerun.cli.main import main

if __name__ == "__main__":
    main()
