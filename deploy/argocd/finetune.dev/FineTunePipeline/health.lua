-- Health of a FineTunePipeline from its conditions.
--
-- A stage that waits for a missing Secret or image is Progressing, not Degraded: Degraded would fail a sync wave at
-- once, although the Secret may come with the same sync.

local status = obj.status or {}
local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end

local function is_true(kind)
  return conditions[kind] ~= nil and conditions[kind].status == "True"
end

local function health(name)
  local ready = conditions.Ready or {}
  return { status = name, message = (ready.reason or "Progressing") .. ": " .. (ready.message or "") }
end

local function progressing(message)
  return { status = "Progressing", message = message }
end

-- The status is about an older spec, or there is no status yet.
if status.observedGeneration ~= obj.metadata.generation or conditions.Ready == nil then
  return progressing("the operator has not read this generation yet")
end

-- Before the requests: the operator handles no request of an object that it cannot read.
if is_true("Stalled") and not is_true("Finished") then
  return health("Degraded")
end

local annotations = obj.metadata.annotations or {}
local handled = status.observedAnnotations or {}
for _, verb in ipairs({ "retry", "cancel" }) do
  local requested = annotations["finetune.dev/" .. verb]
  if requested ~= nil and requested ~= handled[verb] then
    return progressing(verb .. " was requested")
  end
end

if is_true("Ready") then
  return health("Healthy")
end
-- Failed, cancelled, below its gate, or all is done and the server is down.
if is_true("Finished") then
  return health("Degraded")
end
-- While a stage still ends, the pipeline is Reconciling.
if obj.spec.suspend and not is_true("Reconciling") then
  return health("Suspended")
end
return health("Progressing")
