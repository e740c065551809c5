"""The commands: parse, call, save."""
