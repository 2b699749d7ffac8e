"""The capacity planner: what a run needs, its speed, and the time that failures take. Runs on the host."""
