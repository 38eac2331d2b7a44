"""From a network, an optimizer and a level to a train cell."""
