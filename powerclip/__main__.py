"""`python -m powerclip`, the form that torchrun needs."""

from powerclip.cli import main

if __name__ == "__main__":
    main()
