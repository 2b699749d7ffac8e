"""Files of a source: listed, opened, read in pieces, or converted once into an indexed form. Host code."""
