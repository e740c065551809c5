"""The commands: what measures a model, what changes one, what follows a change to the predictions."""
