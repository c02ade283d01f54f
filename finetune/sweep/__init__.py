"""Train one run several times with other values: draw the trials, run them as commands, end weak ones early."""
