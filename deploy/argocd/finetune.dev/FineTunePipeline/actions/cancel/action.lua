local os = require("os")

-- The operator handles each new value once.
if obj.metadata.annotations == nil then
  obj.metadata.annotations = {}
end
obj.metadata.annotations["finetune.dev/cancel"] = os.date("!%Y-%m-%dT%H:%M:%SZ")
return obj
