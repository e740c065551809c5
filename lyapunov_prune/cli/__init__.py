"""The command line: parse, call, save.

- `app`: the commands; `commands/`: what each does; `options`: declared once; `inputs`: what commands make of them;
- `terminal`: how results appear; `demo`: the whole job on the built-in model.
"""
