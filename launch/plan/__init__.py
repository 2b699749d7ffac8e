"""The capacity planner: what a run needs, how fast it will be, and how much of its time failures take."""
