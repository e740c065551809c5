"""Figures and one HTML page, from saved results only: nothing here touches a model."""
