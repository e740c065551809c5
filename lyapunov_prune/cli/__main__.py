"""`python -m lyapunov_prune.cli`, which `accelerate launch -m` needs."""

from lyapunov_prune.cli.app import main

if __name__ == "__main__":
    main()
