"""Pictures of a run in one style, for light and dark, as SVG and PNG. Imports numpy, and matplotlib where it draws."""
