"""How much each matrix is compressed so that a whole model meets a budget: one file per schedule."""
