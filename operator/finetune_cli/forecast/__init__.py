"""What a run would do: which stages run again, on which nodes, with how many steps."""
