"""What a Producer does beside `put`: each verb, or family of verbs, is a base class of it."""
