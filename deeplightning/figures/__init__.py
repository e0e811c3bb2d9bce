"""Figures of a run in one style, for light and dark pages, as SVG and PNG. Imports matplotlib only to draw."""
