"""A page that shows buses at work, in a browser: read from outside, one look a second."""
