"""A reward node: completion -> code -> isolated execution -> verdict -> reward."""
