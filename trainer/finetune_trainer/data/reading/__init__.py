"""Reading files of records: formats, columns, compressed files and batches."""
