"""Pictures as data, which templates draw as tables or as SVG."""
