"""Figures and one self-contained page from saved results; never a model.

- one file for each room whose results it draws; `drawing`: what all figures share; `page`: `report.html`.
"""
