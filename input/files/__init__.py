"""Files of a source: listed, opened, read in pieces, or converted once to an indexed form."""
