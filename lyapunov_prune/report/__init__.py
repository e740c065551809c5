"""Figures and one self-contained page from saved results; never a model.

- one file for each room whose results it draws; `drawing`: what all figures share; `figures`: those of one result;
  `section`, `layer_sections`, `model_sections`: the words of the page beside what draws them; `glossary`: one sentence
  for each term; `page`: `report.html`.
"""
