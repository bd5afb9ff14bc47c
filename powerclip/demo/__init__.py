"""The live page: pictures and captions in a browser, phrases and their best sets of regions, models side by side."""
