"""Whether a DCUT server answers as a plain one does, request feature by request feature."""
