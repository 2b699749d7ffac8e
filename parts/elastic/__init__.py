"""Workers that are lost and come: who continues, and when others are included. Runs on the host."""
