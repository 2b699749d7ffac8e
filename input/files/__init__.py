"""Files of a source: found, opened, read in pieces, or made once into an indexed form. Host code."""
