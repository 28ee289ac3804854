"""``python -m ctxext``, so that launchers which take a module can run it."""

from ctxext.cli import main

if __name__ == "__main__":
    main()
