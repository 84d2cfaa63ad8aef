"""A page that shows buses at work, in a browser: read from outside, one poll a second."""
