"""The forms of records, each converted to the fields of a shape."""
