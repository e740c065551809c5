"""`python -m lyapunov_prune`."""

from lyapunov_prune.cli.app import main

if __name__ == "__main__":
    main()
