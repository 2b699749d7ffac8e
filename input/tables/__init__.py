"""Tables: columns by name, delimited text. Runs on the host."""
