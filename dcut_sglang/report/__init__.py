"""One self-contained HTML page of benchmark rows and decision traces."""
