"""Find the first step in which two runs differ, and what makes the difference."""
