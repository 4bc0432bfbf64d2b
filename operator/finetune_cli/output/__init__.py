"""Everything that is printed: the live display, tables, curves, costs and failures."""
