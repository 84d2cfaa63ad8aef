"""What a Consumer does beside `take`: each verb, or family of verbs, is a base class of it."""
