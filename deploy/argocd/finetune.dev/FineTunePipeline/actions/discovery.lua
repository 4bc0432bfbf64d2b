-- The actions that would change something now.

local status = obj.status or {}
local ready, finished, has_stages = {}, false, false
for _, condition in ipairs(status.conditions or {}) do
  if condition.type == "Ready" then
    ready = condition
  elseif condition.type == "Finished" then
    finished = condition.status == "True"
  elseif condition.type ~= "Reconciling" and condition.type ~= "Stalled" then
    has_stages = true
  end
end

-- Before its first status, a pipeline can be suspended or cancelled like a running pipeline.
local current = status.observedGeneration == obj.metadata.generation
local finished_now = current and finished
-- If the operator cannot read the object, it writes no condition of a stage and handles no request.
local unreadable = current and not has_stages

local function handled(verb)
  local requested = (obj.metadata.annotations or {})["finetune.dev/" .. verb]
  return requested == nil or requested == (status.observedAnnotations or {})[verb]
end

-- A pipeline below its gate, or with a server that is down, has no failed stage. If a stage's result lacks the score of
-- a gate, the stage fails with its result, which a retry keeps.
local function retry_starts_a_stage()
  for _, stage in ipairs(status.stages or {}) do
    if stage.state == "Failed" and stage.result == nil then
      return true
    end
  end
  return false
end

local actions = {}
if unreadable then
  return actions
end
if finished_now then
  if retry_starts_a_stage() and handled("retry") then
    actions["retry"] = { iconClass = "fa fa-fw fa-redo" }
  end
  return actions
end
-- Skip the time between two attempts.
if current and ready.reason == "Retrying" and handled("retry") then
  actions["retry"] = { iconClass = "fa fa-fw fa-redo" }
end
-- A pipeline that is being cancelled stops in any case; only a retry restarts it.
if not handled("cancel") or (status.cancelled and handled("retry")) then
  return actions
end
actions["cancel"] = { iconClass = "fa fa-fw fa-ban" }
if obj.spec.suspend then
  actions["resume"] = { iconClass = "fa fa-fw fa-play" }
else
  actions["suspend"] = { iconClass = "fa fa-fw fa-pause" }
end
return actions
