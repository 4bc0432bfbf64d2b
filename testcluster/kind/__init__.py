"""The provider whose nodes are Docker containers, created by kind."""
