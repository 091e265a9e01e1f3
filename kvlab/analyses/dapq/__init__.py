"""DapQ: does a query's position matter more than its content?"""
