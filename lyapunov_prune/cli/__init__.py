"""The command line: parse, call, save.

- `app`: the commands; `commands/`: what each does;
- `options`: declared once, those of the model and of the text as two records; `ranked`, `removal`: those of what is
  ranked and removed; `records`: how typer takes a record; `checks`: what an
  option names, looked for before torch is imported; `choices`: the names that options take; `inputs`: what
  commands make of them;
- `plans`: the plan that a file holds, and files that are pruned by one;
- `scored`: perplexity, for the commands that score; `jobs`: where unfinished work is kept;
- `terminal`: how results appear; `following`: the command to give next; `failures`: how a command that failed ends;
- `demo`: the whole job on the built-in model.

A new option of one command stands in its signature; one of several commands in `options`. A word that has a meaning
in one command has no other in another.
"""
