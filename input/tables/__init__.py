"""Tables: columns by name, delimited text. Host code."""
