"""`python -m longstrand`, for launchers that start modules."""

from longstrand.cli import main

if __name__ == "__main__":
    main()
