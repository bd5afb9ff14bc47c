"""Figures and reports: heatmaps of phrases over a picture, and the quickstart that compares two models."""
