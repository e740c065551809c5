"""The command line: parse, call, save."""

import typer

app = typer.Typer(no_args_is_help=True)


def main() -> None:
    app()
