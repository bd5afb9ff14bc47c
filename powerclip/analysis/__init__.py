"""Figures and reports: heatmaps of phrases over an image, and the quickstart that compares two models."""
